"""kvguard: a sidecar that guards an engine against a KV tier that stopped paying."""
