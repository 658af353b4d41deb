"""The decoder in JAX, its mesh and shardings, and loading from any layout straight to the devices."""
