"""Scripts that build and check what is published: the site, its pictures, the packages."""
