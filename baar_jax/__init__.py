"""Budget-aware routing for LLM agents, in JAX."""
