"""Three products and their six slots: what is pruned, who runs a product, and the rule that differentiates it."""
