"""python -m torch_ckpt: the torch-ckpt command."""

from torch_ckpt.cli import main

if __name__ == "__main__":
    main()
