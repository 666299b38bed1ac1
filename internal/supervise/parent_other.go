//go:build !unix

package supervise

import (
	"errors"
	"os"
)

func adopt(int) (*os.File, error) { return nil, errors.New("not supported here") }
