"""What a language model believes: confidences of answers, read out and corrected."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={},
)
