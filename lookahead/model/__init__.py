"""What a model is and how its inputs, caches and states are read. This room and `loading` know private names."""
