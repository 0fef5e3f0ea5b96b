"""Put the pages that the guide quotes (mlx_llama/guide/manual.py) into the wheel."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPages(build_py):
    """Copies README.md and docs/ to mlx_llama/guide/pages; an editable install reads them here."""

    def run(self):
        super().run()
        if not self.editable_mode:
            here, pages = Path(__file__).parent, Path(self.build_lib) / "mlx_llama/guide/pages"
            for path in (here / "README.md", *(here / "docs").glob("*.md")):
                target = pages / path.relative_to(here)
                self.mkpath(str(target.parent))
                self.copy_file(str(path), str(target))


setup(cmdclass={"build_py": BuildWithPages})
