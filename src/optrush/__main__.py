"""python -m optrush"""

from optrush.cli.app import main

main()
