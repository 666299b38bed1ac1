//go:build race

package engine_test

// underRace: the race detector makes everything many times slower; random tests do
// a part of their rounds under it, and the whole without.
const underRace = true
