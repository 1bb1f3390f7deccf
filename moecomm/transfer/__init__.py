"""Transfer of the weights of all experts, from the ranks that train them to the ranks that serve them."""

from moecomm.transfer.weight_transfer import WeightTransfer, ranks_over

__all__ = ["WeightTransfer", "ranks_over"]
