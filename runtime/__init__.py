"""The ground floor: settings, errors, logs, model files, text, noise and the device thread."""
