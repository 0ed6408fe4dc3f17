"""Using a trained model: one predictor for library, command line and server."""
