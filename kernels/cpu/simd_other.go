//go:build !amd64

package cpu

func simdOps() []*ops { return []*ops{portableOps()} }

// pause burns about n short instructions.
func pause(n int) {
	for range n {
	}
}
