//go:build !race

package kvconntest

const underRace = false
