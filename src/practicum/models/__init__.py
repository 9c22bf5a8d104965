"""Small models that ship inside packages, and the loading of the user's own from the hub or a folder."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "loading": ["ModelError"],
        "language": ["LanguageModel", "load_language_model"],
        "encoders": ["TokenEncoder", "load_token_encoder"],
    },
)
