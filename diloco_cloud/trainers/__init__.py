"""Ready-made train functions, named by a run as ``package.module:function``."""
