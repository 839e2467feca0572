"""The fault kit: what can go wrong between a cache and its store, made to happen."""
