"""Weights of all experts on their way from the ranks that train them to the ranks that serve them."""

from moecomm.transfer.weight_transfer import WeightTransfer, ranks_over

__all__ = ["WeightTransfer", "ranks_over"]
