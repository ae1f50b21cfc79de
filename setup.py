"settings.ini is the single source of the package's facts; this file hands them to setuptools."
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

cp = ConfigParser(delimiters=["="])
cp.read(Path(__file__).parent / "settings.ini")
c = cp["DEFAULT"]
setup(version=c["version"], description=c["description"], keywords=c["keywords"].split(), author=c["author"],
      author_email=c["author_email"], license="Apache-2.0", url=c["git_url"],
      project_urls={"Documentation": c["doc_host"] + c["doc_baseurl"]},
      classifiers=["Intended Audience :: Developers", "Programming Language :: Python :: 3"],
      install_requires=c["requirements"].split(),
      extras_require={"dev": c["dev_requirements"].split(), "gpu": c["gpu_requirements"].split()},
      entry_points={"console_scripts": c["console_scripts"].split()})
