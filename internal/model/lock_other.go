//go:build !linux && !darwin

package model

import (
	"errors"
	"os"
)

// tryLock creates path, or returns errLocked when it is there. After a crash
// the file has to be removed by hand; the error of the waiter names it.
func tryLock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, os.ErrExist) {
		return nil, errLocked
	}
	if err != nil {
		return nil, err
	}
	f.Close()
	return func() { os.Remove(path) }, nil
}
