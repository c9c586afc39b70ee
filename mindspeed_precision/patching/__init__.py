"""The patch engine: declarations are data (``patches/*.yaml``), one session owns every foreign setattr."""
