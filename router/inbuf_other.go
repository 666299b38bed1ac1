//go:build !unix

package router

// Neither is used: elsewhere connections keep a buffer while they wait.
func readNow(int, []byte) (int, error)  { return 0, errAgain }
func writeNow(int, []byte) (int, error) { return 0, nil }
