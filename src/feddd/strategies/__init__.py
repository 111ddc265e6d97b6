"""The methods compared, behind one protocol."""
