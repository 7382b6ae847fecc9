"""The page of `prefixcached dashboard`: what it is made of, and what it is told.

`site.Site` answers by path; `payload` and `icicle` turn the daemon's replies into JSON; the rest of
this folder is the page itself, which the browser runs as it lies here: nothing is built.
"""
