package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// outFile is where a result goes once it is whole: a regular file gets it in one piece, what is no
// regular file, such as a pipe, as it is. It may be nil: nowhere.
type outFile struct {
	path string      // of the regular file
	mode os.FileMode // of that; 0: as the umask says
	open *os.File    // what is no regular file
}

// createOut looks at a place before there is a result, so that one that cannot be written is known. It leaves nothing there.
func createOut(path string) (*outFile, error) {
	if path == "" {
		return nil, nil
	}
	o := &outFile{path: path}
	switch info, err := os.Stat(path); {
	case err == nil && info.IsDir():
		return nil, fmt.Errorf("%s is a folder", path)
	case err == nil && !info.Mode().IsRegular():
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		return &outFile{open: f}, err
	case err == nil: // a link stays one, and the file as private as it is
		if o.path, err = filepath.EvalSymlinks(path); err != nil {
			return nil, err
		}
		o.mode = info.Mode().Perm()
	}
	f, err := o.create()
	if err == nil {
		_ = f.Close()
		err = os.Remove(f.Name())
	}
	return o, err
}

// create makes a file beside the one that is to be.
func (o *outFile) create() (*os.File, error) {
	f, err := os.OpenFile(o.path+"."+rand.Text(), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666) // less the umask
	if err != nil {
		var at *fs.PathError
		if errors.As(err, &at) {
			err = at.Err
		}
		return nil, fmt.Errorf("%s: %w", o.path, err)
	}
	if o.mode != 0 {
		if err := f.Chmod(o.mode); err != nil {
			return nil, errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}
	return f, nil
}

// drop gives up.
func (o *outFile) drop() {
	if o != nil && o.open != nil {
		_ = o.open.Close()
	}
}

// keep has write write the result.
func (o *outFile) keep(write func(io.Writer) error) error {
	if o == nil {
		return nil
	}
	if o.open != nil {
		return errors.Join(write(o.open), o.open.Close())
	}
	f, err := o.create()
	if err != nil {
		return err
	}
	if err = errors.Join(write(f), f.Close()); err == nil {
		err = os.Rename(f.Name(), o.path)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}
