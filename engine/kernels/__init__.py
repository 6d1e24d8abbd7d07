"""One kernel a file: device code, then its launcher. The stem names its spec and its oracle too."""
