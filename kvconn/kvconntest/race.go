//go:build race

package kvconntest

// UnderRace: the race detector makes everything several times slower.
const UnderRace = true
