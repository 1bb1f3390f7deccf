"""Weights of all experts on their way from the ranks that train them to the ranks that serve them."""

from moecomm.transfer.weight_transfer import WeightTransfer as WeightTransfer
from moecomm.transfer.weight_transfer import ranks_over as ranks_over
