//go:build !linux

package tier

import "os"

func openDirect(path string, flag int) (file, error) {
	f, err := os.OpenFile(path, flag, 0o600)
	if err != nil {
		return nil, err
	}
	return f, nil
}

func lockDir(*os.File) error { return nil }

func memAvailable() int64 { return 0 }

func aligned(n int) []byte { return make([]byte, n) }
