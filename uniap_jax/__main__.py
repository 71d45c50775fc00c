"""`python -m uniap_jax`: the same as `uniap-jax`."""

from uniap_jax.cli import main

if __name__ == "__main__":
    main()
