"""Looks at what ranks did: joins their traces, and says where the time of a step goes."""
