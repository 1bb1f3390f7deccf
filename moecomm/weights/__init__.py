"""Weights of experts that ranks exchange over Windows: they follow placements, and gradients come back."""

from moecomm.weights.expert_weights import ExpertWeights as ExpertWeights
