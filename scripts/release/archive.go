package main

import (
	"archive/tar"
	"compress/gzip"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// file is one that is made here.
type file struct {
	name string // in the release's tree
	data []byte
}

// copied are the files of this repository that a release has.
var copied = map[string]string{
	"LICENSE":                               "LICENSE",
	"CHANGELOG.md":                          "CHANGELOG.md",
	"configs/systemd/README.md":             "README.md",
	"configs/samples/router.yaml":           "configs/router.yaml",
	"configs/samples/prefill.yaml":          "configs/prefill.yaml",
	"configs/samples/decode.yaml":           "configs/decode.yaml",
	"configs/samples/up.yaml":               "configs/up.yaml",
	"configs/systemd/xpyd-router.service":   "systemd/xpyd-router.service",
	"configs/systemd/xpyd-prefill@.service": "systemd/xpyd-prefill@.service",
	"configs/systemd/xpyd-decode@.service":  "systemd/xpyd-decode@.service",
	"configs/systemd/xpyd.sysusers":         "systemd/xpyd.sysusers",
	"configs/systemd/router.yaml":           "systemd/router.yaml",
	"configs/systemd/worker.yaml":           "systemd/worker.yaml",
}

// gather fills the tree of a release beside its binary.
func gather(tree string, made []file) error {
	for from, to := range copied {
		data, err := os.ReadFile(from)
		if err != nil {
			return err
		}
		made = append(made, file{to, data})
	}
	for _, f := range made {
		to := filepath.Join(tree, f.name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(to, f.data, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// archive packs a tree below the folder name. What differs between machines is left out: owners, modes
// but for the x of programs, times and the order of the files.
func archive(to, tree, name string, at time.Time) (err error) {
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() {
		if e := f.Close(); err == nil {
			err = e
		}
	}()
	z, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	if err != nil {
		return err
	}
	t := tar.NewWriter(z)
	add := func(path string, d fs.DirEntry, err error) error { // in lexical order
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		below, err := filepath.Rel(tree, path)
		if err != nil {
			return err
		}
		mode := int64(0o644)
		if info.Mode()&0o100 != 0 {
			mode = 0o755
		}
		if err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: filepath.ToSlash(filepath.Join(name, below)), Size: info.Size(), Mode: mode, ModTime: at, Format: tar.FormatPAX}); err != nil {
			return err
		}
		data, err := os.Open(path)
		if err != nil {
			return err
		}
		defer data.Close()
		_, err = io.Copy(t, data)
		return err
	}
	if err := filepath.WalkDir(tree, add); err != nil {
		return err
	}
	if err := t.Close(); err != nil {
		return err
	}
	return z.Close()
}
