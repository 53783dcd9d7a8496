"""python -m optrush"""

from optrush.cli import main

main()
