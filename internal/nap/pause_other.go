//go:build !linux

package nap

import "time"

func pause(d time.Duration) { time.Sleep(d) }
