from . import pdb  # noqa: F401, TID252
