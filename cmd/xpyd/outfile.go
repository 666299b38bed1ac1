package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// outFile is where a result goes once it is whole: a regular file gets it in one piece, what is no
// regular file, such as a pipe, as it is. It may be nil: nowhere.
type outFile struct {
	*os.File
	path string // of the regular file; "": File is the place itself
}

// createOut opens a place before there is a result, so that one that cannot be written is known.
func createOut(path string) (*outFile, error) {
	if path == "" {
		return nil, nil
	}
	as := os.FileMode(0)
	switch info, err := os.Stat(path); {
	case err == nil && info.IsDir():
		return nil, fmt.Errorf("%s is a folder", path)
	case err == nil && !info.Mode().IsRegular():
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		return &outFile{File: f}, err
	case err == nil: // a link stays one, and the file as private as it is
		if path, err = filepath.EvalSymlinks(path); err != nil {
			return nil, err
		}
		as = info.Mode().Perm()
	}
	f, err := os.OpenFile(path+"."+rand.Text(), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666) // less the umask
	if err != nil {
		return nil, err
	}
	if as != 0 {
		err = f.Chmod(as)
	}
	return &outFile{f, path}, err
}

// drop gives up.
func (o *outFile) drop() {
	if o == nil {
		return
	}
	_ = o.Close()
	if o.path != "" {
		os.Remove(o.Name())
	}
}

// keep has write write the result.
func (o *outFile) keep(write func(io.Writer) error) error {
	if o == nil {
		return nil
	}
	if o.path == "" {
		return errors.Join(write(o), o.Close())
	}
	err := errors.Join(write(o), o.Close())
	if err == nil {
		err = os.Rename(o.Name(), o.path)
	}
	if err != nil {
		os.Remove(o.Name())
	}
	return err
}
