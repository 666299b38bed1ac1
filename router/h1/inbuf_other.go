//go:build !unix

package h1

// Neither is used: elsewhere connections keep a buffer while they wait.
func readNow(int, []byte) (int, error)  { return 0, errAgain }
func writeNow(int, []byte) (int, error) { return 0, nil }
