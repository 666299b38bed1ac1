//go:build !race

package kvconntest

// UnderRace reports whether the race detector is on.
const UnderRace = false
