//go:build race

package kvconntest

// underRace: the race detector makes everything several times slower.
const underRace = true
