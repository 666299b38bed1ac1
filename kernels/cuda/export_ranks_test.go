//go:build cgo && linux

package cuda

import (
	"slices"

	"github.com/xpyd/xpyd/kernels"
)

// LaunchWithout launches a step of all ranks but one.
func (g *Ranks) LaunchWithout(st *kernels.Step, rank int) error {
	all := g.ranks
	defer func() { g.ranks = all }()
	g.ranks = slices.Delete(slices.Clone(all), rank, rank+1)
	return g.Launch(st)
}

// Devices returns how many there are.
func Devices() (n int) {
	lib, err := openLibrary("")
	for ; err == nil; n++ {
		_, err = lib.device(n)
	}
	return max(n-1, 0)
}

// Rank is one rank's backend.
func (g *Ranks) Rank(i int) *Backend { return g.ranks[i] }

// Alone are opt for ranks that compute their steps one after the other, without waits: the results are
// worthless.
func Alone(opt Options) Options {
	opt.alone = true
	return opt
}
