"""One operator a file: a plain-torch reference beside the faster versions, chosen once at assembly."""
