"""Versions of CANN and of the driver, from their files."""

from __future__ import annotations

from mindspeed_precision.capture.installed import installed_versions


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_nothing_installed_is_not_said(tmp_path):
    assert installed_versions({}, tmp_path) == {}


def test_cann_under_its_home(tmp_path):
    home = tmp_path / "cann"
    write(
        home / "aarch64-linux/ascend_toolkit_install.info",
        "package_name=Ascend-cann-toolkit\nversion=8.2.RC1\n",
    )
    assert installed_versions({"ASCEND_HOME_PATH": str(home)}, tmp_path) == {"cann": "8.2.RC1"}


def test_cann_by_its_runtime_and_the_driver_by_its_note(tmp_path):
    write(tmp_path / "usr/local/Ascend/ascend-toolkit/latest/runtime/version.info", "Version=8.1.0\n")
    write(tmp_path / "etc/ascend_install.info", "UserName=x\nDriver_Install_Path_Param=/opt/npu\n")
    write(tmp_path / "opt/npu/driver/version.info", "Version=25.0.rc1.1\nascendhal_version=7.35\n")
    assert installed_versions({}, tmp_path) == {"cann": "8.1.0", "driver": "25.0.rc1.1"}


def test_nvidias_driver(tmp_path):
    write(
        tmp_path / "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n",
    )
    assert installed_versions({}, tmp_path) == {"driver": "550.54.15"}


def test_a_file_without_a_version_is_passed_over(tmp_path):
    write(tmp_path / "usr/local/Ascend/driver/version.info", "\x00\xff nothing here\n")
    assert installed_versions({}, tmp_path) == {}
