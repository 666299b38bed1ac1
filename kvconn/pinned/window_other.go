//go:build !linux

package pinned
