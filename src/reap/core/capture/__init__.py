"""Record the torch calls of policies and transforms once, and replay them without the Python around them."""
