"""Clustering: parts for scikit-learn."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"lmbc": ["LMBC"]})
