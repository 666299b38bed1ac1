//go:build !linux

package ssd

import (
	"os"
	"time"
)

func openDirect(path string, flag int) (*os.File, error) {
	return os.OpenFile(path, flag, 0o600)
}

func lockDir(*os.File) error { return nil }

func unlockDir(*os.File) error { return nil }

func cpuTime() time.Duration { return 0 }

func aligned(n int) []byte { return make([]byte, n) }
