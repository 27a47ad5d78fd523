p = "tests/st2i_dask/test_sd3.py"
s = open(p).read()
s = s.replace(
    """"in_channels": 17}))
    with""",
    """"in_channels": 17}))
    (file.parent / "diffusion_pytorch_model.safetensors").unlink()  # it would be of another shape
    with""",
)
open(p, "w").write(s)
p = "tests/st2i_dask/test_sdxl.py"
s = open(p).read()
s = s.replace(
    """    folder = edited(folders[form], tmp_path / "odd", "unet/config.json", **changes)
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(folder, task=task)
""",
    """    folder = edited(folders[form], tmp_path / "odd", "unet/config.json", **changes)
    # Its weights would not be what the changed configuration says.
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(st2i.LoadError, match=message):
        st2i.load(folder, task=task)
""",
)
open(p, "w").write(s)
