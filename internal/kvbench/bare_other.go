//go:build unix && !linux

package kvbench

import (
	"context"
	"errors"
	"net"
)

var errBare = errors.New("the bare loop is for Linux")

func (s *sender) bare(context.Context, net.Conn, int) (string, error) { return "", errBare }

type bareLoop []struct{}

func dialBare(context.Context, string, int) (bareLoop, error) { return nil, errBare }

func (l bareLoop) transfer(context.Context, *pool, []int32) error { return errBare }

func (l bareLoop) close() {}
