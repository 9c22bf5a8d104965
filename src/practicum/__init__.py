"""Methods of ICML 2026 papers as parts of the tools you already use, each with a check of its claims.

Importing this package imports no method and no framework. A method lives in ``practicum.<field>.<method>``:

>>> from practicum.clustering.lmbc import LMBC
>>> LMBC(n_clusters=10)
LMBC(n_clusters=10)

and the command ``practicum check <method>`` measures what its paper claims.
"""

__version__ = "0.1.0"
