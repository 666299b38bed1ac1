package kerneltest_test

import (
	"math"
	"testing"

	"github.com/xpyd/xpyd/kernels/kerneltest"
)

// Every code is its own value's; between two the nearer one is taken, and the even
// one in the middle.
func TestE4M3(t *testing.T) {
	for i := range 127 {
		v := kerneltest.FromE4M3(byte(i))
		if kerneltest.ToE4M3(v) != byte(i) || i > 0 && kerneltest.ToE4M3(-v) != byte(i)|0x80 {
			t.Errorf("code %x is %v, which is not it", i, v)
		}
		if i == 126 {
			break
		}
		next := kerneltest.FromE4M3(byte(i + 1))
		middle, even := (v+next)/2, byte(i+i%2)
		below, above := math.Nextafter32(middle, 0), math.Nextafter32(middle, 500)
		if kerneltest.ToE4M3(below) != byte(i) || kerneltest.ToE4M3(above) != byte(i+1) || kerneltest.ToE4M3(middle) != even {
			t.Errorf("between %v and %v: %x, %x, %x", v, next, kerneltest.ToE4M3(below), kerneltest.ToE4M3(middle), kerneltest.ToE4M3(above))
		}
	}
	if kerneltest.FromE4M3(0x7e) != 448 || kerneltest.FromE4M3(1) != 0x1p-9 || kerneltest.ToE4M3(1000) != 0x7e {
		t.Error("the ends of the range")
	}
}
