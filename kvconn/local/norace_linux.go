//go:build !race

package local

func (c *Conn) received() {}
