"""Where images and labels come from. `open_data` tells by its structure what it was given, and says it back."""
