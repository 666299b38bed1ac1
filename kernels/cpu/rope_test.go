package cpu_test

import (
	"testing"

	"github.com/xpyd/xpyd/kernels"
	"github.com/xpyd/xpyd/kernels/cpu"
)

func ropeOf(t *testing.T, a kernels.Arch) ([]float64, float64) {
	t.Helper()
	freq, factor, err := cpu.RopeFrequencies(a)
	if err != nil {
		t.Fatal(err)
	}
	return freq, factor
}
